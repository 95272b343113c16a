"""How the planning problem is solved: as arrays (`arrays`), narrowed by bounds (`bounds`), as an integer program
(`integer`)."""
