"""Makes pages about runs, from the files that runs have left."""
