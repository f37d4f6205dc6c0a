"""The model of GPU time that ranks configs."""
