"""
What the programs share. No file here is run by itself, and none imports a program.

The second column says which programs need a file: train.py, bench.py, data.py with tasks.py,
sample.py, or all.

every program
    configurator    all             a command line and config files
    errors          all             an error that a user has caused is said in one line
    files           all             files that are whole or not there at all

a run
    run_folder      all             the folder of a run: which one is meant, who may write into it
    checkpoint      all             what a ckpt.pt holds, how it is written and read
    resume          train           where a run starts: anew, or from an earlier checkpoint

training
    distributed     all             the device; several processes, and signals that stop them
    optim           train           which weights are trained; AdamW and Muon
    training_log    train           log.csv, the lines on the screen, loss spikes
    evaluation      train, bench    held-out losses, the health of the states

what is learned
    encoding        all             text to tokens and back

decoding, and what is drawn
    points          bench           methods, what is measured of them, and a row of bench.csv
    comparison      bench           bench.py's table and figures, from the rows of bench.csv
    calibration     bench           chooses thresholds of exit rules that keep a promise
    thresholds      bench, sample   reads and writes exits.json, which holds calibrated thresholds
    plots           all             matplotlib: what all figures share
    tables          bench           a table in the terminal
    colours         sample          text on the colour of its loop steps

A figure is drawn where its numbers come from, with what plots.py has for all figures. The figures
of bench.py and train.py are in plots.py too: these two programs load matplotlib only when they
draw, at an evaluation or at the end.
"""
