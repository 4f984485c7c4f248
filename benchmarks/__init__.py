"""One command for each figure of the documentation. Each prints one JSON document on stdout; `python -m
benchmarks.NAME --help`.
"""
