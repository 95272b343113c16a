"""Plans and programs: recording and replaying plans, programs of other shapes, cost formulas, memory probing."""
