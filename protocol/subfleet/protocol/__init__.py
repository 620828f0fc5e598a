"""The wire contract, in the standard library alone: messages, topics, tensor container, blobs, specs, errors."""
