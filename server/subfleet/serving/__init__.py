"""A server at work: settings, rounds, aggregation, programs, link and journal put together."""
