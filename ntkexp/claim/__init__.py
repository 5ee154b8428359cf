"""Preregistered tests of claims from papers, with controls.

A *look* is one statistical test. It consists of runs or a trial, seeds, a measured
quantity, and the expected range of this quantity. A claim is judged by a main look, a
second look (a replication), and mostly a control.

Each module imports only from the modules listed before it:

trial, expectation, quantity     the parts of a look
look                             a look, and the three looks that decide a claim
judge, simulation                the verdict on each look; the judge's error rates on invented data
judged, rule_picture             a judged claim, and the base class of pictures; pictures of rules
claim, picture, paper_figures    the claim; the default picture; figures in the axes of papers
papers, read                     components for single papers; read claims from YAML
conduct                          run a claim and write its verdict
publication, publish             files of published claims; publish and check verdicts
"""
