"""A server at work: settings, rounds, folding, programs, link and journal put together."""
