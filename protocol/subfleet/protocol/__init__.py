"""The wire contract, in the standard library alone: messages, topics, tensors, blobs, architectures, errors."""
