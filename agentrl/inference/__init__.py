"""Models behind servers: chat sessions, backends, and the embedded engine."""
