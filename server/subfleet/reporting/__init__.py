"""What people see of a run: the folder of results, its page, the HTTP API."""
