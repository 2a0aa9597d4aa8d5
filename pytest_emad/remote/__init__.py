"""Decoders in other processes: the methods of ``emad_ref.protocol`` over a byte stream, as specified in docs/wire.md.

    frames       a header and arrays as bytes         address    where a decoder is: a program, a server
    json_fields  typed JSON values, points as JSON    transport  the program or the socket, and how it ended
    messages     contents of a frame                  client     the judge's side: Decoder and Session
                                                      server     the decoder's side, for any factory

NumPy and the standard library only.
"""
