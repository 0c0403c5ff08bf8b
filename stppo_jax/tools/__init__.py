"""Programs that look at what runs do or have done; the core imports none."""
