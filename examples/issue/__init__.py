"""What solve_issue.py solves, and what it asks: a library with a known bug, its judge, two models.

more-itertools 10.8.0: `numeric_range(0, 10, 2)[::-1]` is empty, and other slices with a negative
step are wrong as well. Public as pull request 1128 of more-itertools, repaired in 11.0.0.
"""
