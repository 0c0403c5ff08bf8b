"""Questions and corpora: synthetic worlds and files."""
