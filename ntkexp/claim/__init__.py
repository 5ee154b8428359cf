"""Claims of papers: stated before measuring, then judged together with a control.

Each line imports only from the lines above it:

trial, expectation, quantity     the parts of a look
look                             the three looks that decide a claim
judge, judged                    the verdict on each look; the judged claim, and base of pictures
claim, picture                   the claim; the default picture, and figures in the axes of papers
papers, read                     trials and pictures of papers; claims from YAML
conduct                          from a claim to its verdict
publication, publish             published claims, judged again
"""
