"""Commands that outblas-lab adds to ``outblas``: one file and one line in lab_commands.py each."""
