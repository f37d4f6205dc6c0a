"""OutBLAS for makers: agents and their comparison, the shipped library, training, language models, publishing."""
