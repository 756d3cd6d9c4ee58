"""Weight formats: how a matrix of units lies in memory. One file per format; `linear.py` says what each answers.

What belongs here: the bits, their products, rows, parts and bytes. Which layer has which format does not.
"""
