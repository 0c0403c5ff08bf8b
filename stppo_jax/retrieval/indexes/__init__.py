"""The indexes behind a server: BM25, dense, FAISS, and hybrids of them."""
