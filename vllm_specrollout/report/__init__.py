"""Pictures of a trace: a page for a browser, and tracks for Perfetto.

What belongs here: what each request did in each step, as columns, and their two forms. A trace is only read.
"""
