"""Parts of `benchmarks/search.py`."""
