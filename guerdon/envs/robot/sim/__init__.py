"""A simulated arm with a peg that speaks the protocol of a real robot server."""
