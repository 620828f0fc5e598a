"""The device agent: joins a fleet, trains what fits, and keeps what it did until the server has it."""
