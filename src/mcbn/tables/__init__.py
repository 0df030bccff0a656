"""What a person has on disk: tables and arrays to read in blocks, models to import, results to write."""
