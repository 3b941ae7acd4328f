# SPDX-License-Identifier: Apache-2.0
"""The command line: `omnitrl …`, and the parser that the example scripts share."""
