"""HTTP between processes: one client and one server for all protocols."""
