"""
What the programs share. No file here is run by itself, and none imports a program.

every program
    configurator    a command line and config files
    errors          what a user has caused is said in one line
    files           files that are whole or not there at all

a run
    run_folder      the folder of a run
    checkpoint      what its ckpt.pt holds, how it is written and read
    resume          what a run of train.py goes on from

training
    distributed     the device, several processes, signals
    optim           which weights are trained; AdamW and Muon
    training_log    log.csv, the lines on the screen, loss spikes
    evaluation      held-out losses, the health of the states

what is learned
    examples        what a data set and a task have in common
    own_text        documents of text files, or of nanoGPT's tokens
    fineweb         a stream of documents from Hugging Face's hub
    torchdocs       the text of the first run
    writer          tokens while they are written, and how far an interrupted call came
    encoding        text to tokens and back
    tokenizer_json  the same with the tokenizer.json of a public model

decoding, and what is drawn
    points          what bench.py measures, and its row of bench.csv
    comparison      its table and figures, from these rows
    calibration     thresholds that keep a promise
    thresholds      these in a file
    plots           matplotlib: what all figures share
    tables          a table in the terminal
    colours         text on the colour of its loop steps

A figure is drawn where its numbers come from: geometry.py and results/figures.py draw their own.
In plots.py are those of bench.py and train.py, which load matplotlib at their end alone, and the
two GIFs.
"""
