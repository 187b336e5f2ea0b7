"""Clients of inference servers: chat sessions, chat templates, the router, and the kinds of server."""
