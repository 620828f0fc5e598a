"""How messages travel: the Transport seam, MQTT, an in-process one, receipts and pulled chunks."""
