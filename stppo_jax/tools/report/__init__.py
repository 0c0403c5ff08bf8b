"""Pages about runs: figures, tables and dialogues, from what runs have left."""
