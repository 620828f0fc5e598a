"""Message transport: the Transport seam, MQTT, an in-process broker, acks and blob transfers in requested chunks."""
