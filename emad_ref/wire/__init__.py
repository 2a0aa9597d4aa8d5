"""Decoders in other processes: the methods of ``emad_ref.protocol`` over a byte stream, as docs/wire.md says them.

    frames     a header and arrays as bytes           address     where a decoder is: a program, a server
    fields     one JSON value, held against its type  transport   the program or the socket, and how it ended
    points     operating points as JSON               connection  one call after the other, each with a time limit
    messages   what stands in a frame                 remote      the judge's side: Decoder and Session
    streams    bytes, with an end to every wait       serving     the decoder's side, for any factory
    failure    the one way in which it breaks

NumPy and the standard library only.
"""
