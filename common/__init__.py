"""
What the programs share. No file here is run by itself, and none imports a program. There is one
way up: checkpoint.class_of imports the class that a checkpoint or a knob names, `model:GPT`.
"""
