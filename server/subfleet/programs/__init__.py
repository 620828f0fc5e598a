"""What tasks need: cost estimates of sizes, programs from the exporter, weights cut from the model."""
