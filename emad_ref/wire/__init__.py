"""Decoders in other processes: the methods of ``emad_ref.protocol`` over a byte stream, as docs/wire.md says them.

    frames     a header and arrays as bytes           address     where a decoder is: a program, a server
    points     operating points as JSON               transport   the program or the socket, and how it ended
    messages   what stands in a frame                 connection  one call after the other, each with a time limit
    streams    bytes, with an end to every wait       remote      the judge's side: Decoder and Session
    failure    the one way in which it breaks         serving     the decoder's side, for any factory

NumPy and the standard library only.
"""
