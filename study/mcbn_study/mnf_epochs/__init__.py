"""MNF's test error by epochs."""
