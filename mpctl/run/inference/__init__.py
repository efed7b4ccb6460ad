"""Using a trained model: text from it (`mpctl sample`), its loss on text (`mpctl eval`).

    trained_model.py  a run, a checkpoint or a Hugging Face directory as a model to read
    task.py           worker processes that hold the model, one a rank, on this machine
    sample.py         prompts in, texts out
    evaluate.py       corpora in, losses out

Nothing is written where the model is.
"""
