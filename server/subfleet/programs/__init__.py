"""What tasks need: prices of sizes, programs from the exporter, weights cut from the model."""
