"""Questions, passages and demonstrations of synthetic worlds and of files."""
