"""
What the programs share. No file here is run by itself, and none imports a program. There is one
way up: checkpoint.class_of imports the class that a checkpoint or a knob names, `model:GPT`.

    configurator    a command line and config files -> a script's knobs; 'calc:p=7' -> a Calc
    errors          bad input is said in one line
    files           files that are whole or not there at all
    terminal        tables, and text on the colour of its loop steps
    plots           matplotlib: what all figures share, and that of train.py
    encoding        text to tokens and back

    checkpoint      what a ckpt.pt holds; the folder of a run
    device          the device, and its threads
    distributed     several processes, and the signals that stop them
    optim           AdamW and Muon
    evaluation      held-out losses
"""
