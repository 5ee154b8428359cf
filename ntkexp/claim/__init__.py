"""Claims of papers: stated before measuring, then judged together with a control.

Each line imports only from the lines above it:

trial, expectation, quantity     the parts of a look
look                             the three looks that decide a claim
judge, simulation                the verdict on each look; how often the judge errs
judged, rule_picture             the judged claim, and base of pictures; pictures of rules
claim, picture                   the claim; the default picture, and figures in the axes of papers
papers, read                     trials and pictures of papers; claims from YAML
conduct                          from a claim to its verdict
publication, publish             published claims, judged again
"""
