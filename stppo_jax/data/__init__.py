"""Makes and reads questions, passages and demonstrations."""
