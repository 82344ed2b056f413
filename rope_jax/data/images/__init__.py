"""Single images: decoding, crops, augmentation on the host and on the device, normalisation."""
