"""What GPU backends share beyond kernels: captured graphs, capture sizes, tuning."""
