"""Makes reports about runs from the files in their folders."""
