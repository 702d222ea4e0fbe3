"""Problems that need depth: the shipped rows, the tables, and all of it on runs made tiny."""
from test_results import in_process

from results import depth, runs
from results.runs import pick


def test_what_depth_names_has_rows():
    made = {(row['part'], row['variant'], row['seed']) for row in runs.load('depth')['runs']}
    assert made >= set(depth.trainings())


def test_deeper_weighs_by_labels():
    rows = [dict(seed=1, loops=n, depth=d, labels=labels, accuracy=share)
            for n in depth.DEEPER_LOOPS
            for d, labels, share in ((0, 3, 1.0), (4, 1, 0.0), (5, 1, 0.5), (9, 1, 0.25),
                                     (13, 1, 0.25), (23, 1, 0.25))]
    table = list(depth.deeper_table(dict(deeper=rows)))
    assert table[2] == '| 4 | 75.0 | 50.0 | 25.0 | 25.0 | 25.0 |'


def test_all_is_run_once_and_gathered(tmp_path, monkeypatch):
    calls = in_process(monkeypatch, tmp_path, 'pydocs', {})
    tiny = ['--n_embd=16', '--max_iters=4', '--warmup_iters=1', '--batch_size=4',
            '--eval_windows=4', '--keep_iters=[]', '--mean_recurrence=2', '--log_interval=2']
    for name, value in dict(seeds=[1], more=tiny, parts=['calc', 'levers'], STACKS=dict(
            calc=(depth.CALC, 1, 2)), LEVERS={'x0 zero': ['--x0=zero']}).items():
        monkeypatch.setattr(depth, name, value)
    monkeypatch.setattr(depth, 'markdown', lambda: '')
    depth.main()
    assert calls == ['train.py'] * 4 + ['depth']
    t = runs.load('depth', 'results')
    assert {(row['part'], row['variant'], row['seed']) for row in t['runs']} == {*depth.trainings()}
    looped, plain = (pick(t['runs'], part='calc', variant=name)[0]['parameters']
                     for name in ('looped', 'stack'))
    block, around = 12 * 16 ** 2 + 4 * 16, 13 * 16 + 16     # norms; embedding and last norm
    assert looped == 3 * block + around + 2 * 16 ** 2 + 16 and plain == 4 * block + around
    # what is done is not done again; the rows of other parts stay
    monkeypatch.setattr(depth, 'parts', ['calc', 'others'])
    depth.main()
    assert calls[5:] == ['train.py'] * 2 + ['depth']
    t = runs.load('depth', 'results')
    assert {row['part'] for row in t['runs']} == {'calc', 'levers', 'others'}
    assert {row['seed'] for row in t['deeper']} == {1}
