"""The files from which a run is recovered. After a kill at any byte they hold enough to resume it.

Read `atomic_files.py` (appended lines and replaced files; files that somebody else has named),
`segments.py` (files of frames) and `journal.py` (the history of every ticket, in them), `pass_log.py` (the sampled tokens, pass by pass),
`spelling.py` (records as JSON) and `shared_directory.py` (whether ranks on other machines see these files).
"""
