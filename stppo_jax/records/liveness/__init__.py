"""Who runs a run, whether it goes on, and where its time goes."""
