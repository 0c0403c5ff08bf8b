"""Questions, passages and demonstrations: synthetic worlds and files."""
