# SPDX-License-Identifier: Apache-2.0
"""PRPN, the parsing-reading-predict network (Shen et al., ICLR 2018), and PRPN-SYD (Du et al., ACL 2020)."""
