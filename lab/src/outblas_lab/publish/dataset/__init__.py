"""A recording as a data set: Parquet tables, a data sheet, a dataset card, and files of Kernel Tuner."""
