"""The optimum within limits as a mixed integer program for HiGHS."""
