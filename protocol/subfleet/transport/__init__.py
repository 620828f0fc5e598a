"""How messages travel: the Transport seam, MQTT, an in-process one, acks and pulled chunks."""
